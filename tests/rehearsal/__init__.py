"""`make rehearsal`: each dimension of the mission at its true size, everything else tiny."""
