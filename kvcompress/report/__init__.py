"""Boards and figures made from records alone."""
