"""Pipeline schedules, the programs of steps, and the engines that simulate them."""
