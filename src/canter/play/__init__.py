"""A trained policy at work: playing, judging, filming, exporting."""
