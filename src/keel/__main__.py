"""python -m keel"""

from keel.cli import main

main()
