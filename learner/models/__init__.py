"""Model folders that engine and learner load alike: from a hub, a package, a folder, or random."""
