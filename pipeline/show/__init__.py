"""``afterplay show``: the rollouts of a run, listed, printed, and as one page for a browser.

``reading`` finds trajectories in stores and traces; ``vocabulary`` makes text of token ids, each for itself; ``views``
is what is known of a transcript, as JSON; ``terminal`` prints it; ``page`` puts it into one HTML file.
"""
