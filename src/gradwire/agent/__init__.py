"""Requests and answers between named workers; knows no functions, no gradients."""
