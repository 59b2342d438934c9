"""Starting inference servers: the command line of each kind, the process around it, and a context manager for tests and tools."""

from actors.engine.servers.launch import command, main
from actors.engine.servers.vllm import vllm_available

__all__ = ["command", "main", "vllm_available"]
