"""The replay stage: admission, leases, groups, placement, dispatch, evaluation."""
