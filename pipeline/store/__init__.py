"""The durable state of the stage: SQLite tables, records, ledger, traces, archives."""
