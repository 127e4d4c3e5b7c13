"""Published policies, which the trainer writes and the rollout service reads: digests, deltas, storage, copies."""
