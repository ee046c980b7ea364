"""Head classes for FlexiCache, the same as `kvcompress profile-heads`: python scripts/profile_heads.py --model smollm2"""

from kvcompress.commands.profile_heads import main

if __name__ == "__main__":
    raise SystemExit(main())
