"""Parameters on a mesh of devices: each part where it belongs, padded and cut as the rules say."""
