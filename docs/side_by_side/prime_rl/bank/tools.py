"""The server of the tools."""

import verifiers.v1 as vf

from bank.accounts import balance


class BankTools(vf.Toolset[vf.ToolsetConfig]):
    TOOL_PREFIX = "bank"

    @vf.tool
    def balance(self, name: str) -> int:
        """Look up the balance of an account."""
        return balance(name)


if __name__ == "__main__":
    BankTools.run()
