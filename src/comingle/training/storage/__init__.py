"""Users' tensors and data on disk, for populations larger than memory."""
