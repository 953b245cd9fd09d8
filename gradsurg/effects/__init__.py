"""Effects of transforms in numbers, and the ledger of calls."""
