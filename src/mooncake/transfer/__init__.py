"""Moving bytes: segments and their tables, and the transports between them and a process's memory."""
