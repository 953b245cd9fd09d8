"""Published claims, run again and held against bands that were stated before."""
