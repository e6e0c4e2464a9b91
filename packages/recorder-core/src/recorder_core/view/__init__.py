"""The trajectory page: runs, their forests and their tokens, for people who look.

`forest` says what a run is made of, `pieces` what its tokens are as bytes; `shell` gives out the
page itself, whose files are in `static`. `serve` is a server of its own: its `app` shows what
`sources` gathers from engines and files.
"""
