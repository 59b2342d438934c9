"""Starting inference servers: command lines, the process around them, a context manager for tests and tools."""

from actors.engine.servers.launch import command, main
from actors.engine.servers.vllm import vllm_available

__all__ = ["command", "main", "vllm_available"]
