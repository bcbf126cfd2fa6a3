"""Distributed dynamic sparse attention for ultra-long context training."""
