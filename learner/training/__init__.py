"""One update: scoring passes, advantages, loss, optimizer step."""
