"""Other people's image-text pairs -> clean tar shards.

The way: a source (`folders`, `tables`, `coco`, `parquet`, `shards`) lists its items in parts; `convert` reads, resizes and
re-encodes one part and notes what it needs to know of every example; `duplicates` and `owners` choose which stay, over all
parts; `pipeline` runs this in parallel, goes on after a kill, and writes shards, provenance and a private report.
"""
