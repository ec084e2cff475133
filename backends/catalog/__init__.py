"""The nouns of Headrace: plain frozen data that every other room may import and that imports nothing of ours."""
