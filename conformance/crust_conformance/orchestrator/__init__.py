"""The CO of the cases: calls with their transcript, usual sequences, undoing, and a view of the host."""
