from bank.taskset import BankTaskset

__all__ = ["BankTaskset"]
