"""The job of all four programs: can the account pay the price?"""

BALANCES = {"Ann": 12, "Bob": 3, "Cem": 7}
TASKS = [
    {"name": name, "price": price, "answer": "yes" if balance >= price else "no"}
    for name, balance in BALANCES.items()
    for price in range(1, 16)
]


def question(task):
    return f"The price is {task['price']}. Can {task['name']} pay it? Reply with yes or no only."


def balance(name: str) -> int:
    """Look up the balance of an account.

    Args:
        name: Owner of the account.
    """
    return BALANCES[name]


def right(reply, answer):
    return float((reply or "").strip().strip(".").lower() == answer)
