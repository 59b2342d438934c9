"""One update on several processes: FSDP2 shards the weights, each rank computes its share of the rows.

Rank 0 alone speaks with the replay stage and the engines; the others follow its orders (``orders``). All ranks then run
the same ``Trainer.step`` over the same rows and meet in its collectives (``group``).
"""
