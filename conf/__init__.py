"""Configuration: typed, validated once, before any weights load. Knows nobody."""
