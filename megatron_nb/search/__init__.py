"""A wiki as a corpus to search: pages, the graph of their links, an index, and the way to ask them here or over HTTP."""
