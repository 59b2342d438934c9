"""The life of a process: role, run directory, child processes, guards around plug-ins."""
