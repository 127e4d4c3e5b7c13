"""Durable writes, model folders, and reading Parquet without pyarrow."""
