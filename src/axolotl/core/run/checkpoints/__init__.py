"""Checkpoints that are complete or not there: how they are written, verified, found, kept and gone on from.

    manifest.py   what a checkpoint consists of; does it still
    store.py      written under a temporary name, made durable, given its manifest, renamed; which are kept
    finding.py    the newest one that verifies, and why others were skipped
    settings.py   which settings of a run may change when it goes on
    lock.py       one live run an output directory

Nothing here imports torch: `axolotl verify-checkpoint` answers at once.
"""
