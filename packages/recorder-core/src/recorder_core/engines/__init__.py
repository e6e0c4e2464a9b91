"""What the engine packages have in common: releases, refusals, stamped version labels."""
