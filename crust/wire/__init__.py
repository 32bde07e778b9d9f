"""Generated protobuf code: made by `make proto` from specs/proto, never edited."""
