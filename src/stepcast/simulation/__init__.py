"""Schedules, programs and the engines that run them."""
