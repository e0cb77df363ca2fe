"""The part of doublure that trains: server, job process, models, gate, checkpoints."""
