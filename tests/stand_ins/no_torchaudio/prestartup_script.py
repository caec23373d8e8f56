"""Runs in the server's process before any node file is imported; a real torchaudio comes first and is used."""

import os
import sys

sys.path.append(os.path.join(os.path.dirname(__file__), "modules"))
