"""Tasks that are rows of a data set: JSONL, Parquet or a Hugging Face data set, by configuration (docs/DATA.md)."""
