"""What must hold in every test of faults, whatever was killed:

1. a get returns exactly what was put, or a miss or an error (`values`, `history`);
2. every call ends within its limit (`watch`);
3. afterwards what the scenario took is given back (`baseline`);
4. nothing dies that was not killed (`cast`).
"""
