"""Synthetic pictures with true captions: no private image, no person, no privacy cost.

`generate.SyntheticData` gives the example of any index: picture, caption and the scene behind both. The way:
`compose` (seed and index -> scene and statement), `scene` (statement -> true text), `render` (scene -> pixels, and a look at
many), `write` (tar shards with provenance).
`scenes` is a world apart: public photographs of clothes and printed letters in clutter, rendered in blocks.
"""
