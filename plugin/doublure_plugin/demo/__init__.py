"""`doublure demo`: the main job on the embedded host, with pictures and figures of it."""
