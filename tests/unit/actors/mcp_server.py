"""A small MCP server for tests, over stdio or HTTP (``--http PORT``)."""

import os
import sys
import time

try:
    from mcp.server.mcpserver import MCPServer
except ImportError:
    from mcp.server.fastmcp import FastMCP as MCPServer

from mcp.types import BlobResourceContents, EmbeddedResource, TextResourceContents

server = MCPServer("test")


@server.tool()
def add(a: int, b: int) -> str:
    """Add two integers."""
    return str(a + b)


@server.tool()
def fail(why: str) -> str:
    """Fail."""
    raise ValueError(why)


@server.tool()
def die() -> str:
    """End the process."""
    os._exit(3)


@server.tool()
def sleep(seconds: float) -> str:
    """Sleep."""
    time.sleep(seconds)
    return "awake"


@server.tool()
def who() -> str:
    """The process id."""
    return str(os.getpid())


@server.tool()
def read() -> list[EmbeddedResource]:
    """A file with text in it, and one without."""
    text = TextResourceContents(uri="file:///a", text="words of a file")
    return [
        EmbeddedResource(type="resource", resource=text),
        EmbeddedResource(type="resource", resource=BlobResourceContents(uri="file:///b", blob="AA==")),
    ]


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run("streamable-http", port=int(sys.argv[2]))
    else:
        server.run("stdio")
