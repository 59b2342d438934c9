"""Starting and guarding inference servers."""
