"""Live: a scheduler that carries out what a policy decides, by supervisors of workers that outlive it.

records (SQLite)  ->  Book  ->  policy  ->  shares  ->  supervisors: "workers: 3"
"""
