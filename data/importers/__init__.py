"""Turns image-text pairs of other projects into clean tar shards.

A source (`sources`) lists its examples in parts. `convert` cleans captions, resizes and encodes the
images of one part and notes the facts of every example that the choice needs. `pipeline` runs it in
parallel, chooses examples over all parts, and writes shards, provenance and a private report.
"""
