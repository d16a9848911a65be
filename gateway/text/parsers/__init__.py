"""One file per format in which models write calls and thoughts. Knows no tokens, no requests and no network."""
