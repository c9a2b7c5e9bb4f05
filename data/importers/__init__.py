"""Other people's image-text pairs -> clean tar shards.

A source (`sources`) lists its items in parts; `convert` cleans captions, resizes and encodes the images of one part and notes
what it needs to know of every example; `pipeline` runs this in parallel, chooses which examples stay, over all parts, and writes
shards, provenance and a private report.
"""
