"""What all tests share."""

from hypothesis import settings

# A loaded machine with two cores is no reason for a property to fail.
settings.register_profile("afterplay", deadline=None)
settings.load_profile("afterplay")
