"""The quick start with tools: a tiny model learns when to call a calculator."""
