"""The shim beside a vendor's controller: takes keys of crust out of requests, and answers them in the context."""
