"""Benchmarks of the costs of gradsurg: python -m scripts.bench"""
