"""What theory and memory say of a target, its drafts and its GPUs before any of them runs: `specserve plan`."""
